"""Commands ``export`` and ``import``."""
