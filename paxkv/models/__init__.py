"""Decoders over paged caches: one functional flax module, and the families that are values of its configuration."""
