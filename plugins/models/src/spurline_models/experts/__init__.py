"""Mixtures of experts: find their routers, balance the choice of experts, and replay the choice of an engine."""
