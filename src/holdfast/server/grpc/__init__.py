"""The gRPC face: each call is the HTTP request that the proto file names, and goes the same way."""
