"""Metrics in Weights & Biases, MLflow, TensorBoard, Trackio, SwanLab, OpenTelemetry and Prometheus."""
