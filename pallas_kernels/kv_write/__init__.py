"""New keys and values into their pages: ``api`` has the public function, other files one implementation each."""
