"""Reports of the laboratory."""
