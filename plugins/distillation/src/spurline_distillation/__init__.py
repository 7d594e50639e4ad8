"""Learn from a teacher: on-policy distillation, divergences of whole distributions, served teachers."""
