"""Bundles and catalogs for the Operator Lifecycle Manager (OLM).

`products` describes the two operators, `csv` makes the ClusterServiceVersion from the rendered kustomization, `bundle`
the files of a bundle, `catalog` a file-based catalog with the upgrade graph, and `checks` validates both.
"""
