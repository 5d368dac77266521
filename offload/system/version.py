"""The version of this package, which needs not be installed to run."""

__version__ = "0.1.0"
