"""From measurements to profiles: read, fit, cross-validate, transfer, score; discover a mesh."""
