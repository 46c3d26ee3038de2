"""Recurrent layers, as all runners that compute them take them over."""
