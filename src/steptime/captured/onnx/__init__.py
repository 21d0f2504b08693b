"""ONNX files as programs: the operators are those that PyTorch runs for them, weights are never loaded."""

from steptime.captured.onnx.step import OnnxModel, program_of_file, read_onnx

__all__ = ["OnnxModel", "program_of_file", "read_onnx"]
