"""Commands about whole runs."""
