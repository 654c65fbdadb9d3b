"""Stubs for gRPC, made by protoc from proto/holdfast/v1/holdfast.proto: run `python tools/proto.py`."""
