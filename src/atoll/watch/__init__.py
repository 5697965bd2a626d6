"""Shows a run while it trains: reads its events, thins them, and serves them as one page."""
