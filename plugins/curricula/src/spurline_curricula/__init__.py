"""Mixtures of datasets and orders of prompts that follow success."""
