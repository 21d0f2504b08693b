"""ONNX files as graphs: the operators become the ATen operators that PyTorch would run, weights are never loaded."""

from steptime.captured.onnx.model import OnnxModel, read_onnx
from steptime.captured.onnx.step import program_of_file, program_of_model

__all__ = ["OnnxModel", "program_of_file", "program_of_model", "read_onnx"]
