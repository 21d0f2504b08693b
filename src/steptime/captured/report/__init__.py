"""Reports on real models."""
