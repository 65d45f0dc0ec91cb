"""Attention of ragged rows over paged keys and values: ``api`` has the public functions, other files one part each."""
