"""Attention over paged latents (multi-head latent attention): ``api`` has the public function."""
