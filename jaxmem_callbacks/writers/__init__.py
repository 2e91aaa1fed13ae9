"""Records in; TensorBoard, JSON lines and console out."""
