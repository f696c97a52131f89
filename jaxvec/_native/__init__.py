"""The native library: C++ behind plain C functions, loaded with ctypes by `library`."""
