"""Reports of what was measured."""
