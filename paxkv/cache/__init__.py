"""The paged KV cache: a pytree of pages and pure functions over it. Name the module you need: ``paxkv.cache.pages``."""
