"""Prove after each publish that every engine generates with the published weights."""
