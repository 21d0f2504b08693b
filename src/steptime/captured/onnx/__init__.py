"""ONNX files as graphs: the operators become the ATen operators that PyTorch would run, weights are never loaded."""

from steptime.captured.onnx.step import OnnxModel, program_of_file, program_of_model, read_onnx

__all__ = ["OnnxModel", "program_of_file", "program_of_model", "read_onnx"]
