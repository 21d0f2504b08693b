"""Parameters of training frameworks, fitted to measured runs."""
