"""The seams (`api`) and the coordination backends behind them."""
