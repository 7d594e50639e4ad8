"""Mixtures of experts: finding routers, balancing what they choose, and replaying what an engine chose."""
