"""Pallas kernels over paged keys and values. The package root imports nothing: name the module you need."""
