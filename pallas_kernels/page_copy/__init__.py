"""Whole pages of all layers, copied, taken out and put back: ``api`` has the functions, other files one way each."""
