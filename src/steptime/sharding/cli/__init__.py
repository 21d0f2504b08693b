"""Commands on shardings."""
