"""Builds the documentation site: the pages of docs/, and references made from the code.

This package runs in the source tree (`make docs`). It is not part of the product.
"""
