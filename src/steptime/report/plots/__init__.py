"""Figures for papers and the series behind them, from results as the API gives them."""
