"""Where metrics may go: TensorBoard, Trackio, W&B."""
