"""voxscale: train 3D medical-imaging models from one config, unchanged from a laptop to a cluster."""

__version__ = "0.1.0"
