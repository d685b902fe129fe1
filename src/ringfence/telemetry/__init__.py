"""What a gateway tells those who operate it: metrics, traces and a log of its calls. None of it holds a value."""
