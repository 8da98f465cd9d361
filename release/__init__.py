"""Makes releases: versions, bundles for OLM, archives, bills of materials, provenance and signatures.

This package runs in the source tree (`make release`, `make bundle`, `make version`). It is not part of the product.
"""
