"""Boxes whose programs run in WebAssembly, in a process that may die, in a box of the process backend."""
