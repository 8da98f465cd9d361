"""Edits of manifests that keep comments, order and quotes: versions, registries, digests and pull policies of images.

`edits.edit` is a pure function of the text of a file. `files` finds and replaces the files of directories. YAML is
parsed for the positions of its values; everything between the replaced values stays as it is.
"""
