"""The decoder, models of the hub, export and sampling."""
