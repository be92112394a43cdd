"""What is in an ONNX file, as plain values; the only part that reads `onnx` besides the demo."""
