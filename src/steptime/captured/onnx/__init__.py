"""ONNX files as programs of the operators that PyTorch runs for them; weights are never loaded."""

from steptime.captured.onnx.step import OnnxModel, program_of_file, read_onnx

__all__ = ["OnnxModel", "program_of_file", "read_onnx"]
