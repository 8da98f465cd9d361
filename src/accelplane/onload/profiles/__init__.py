"""Onload profiles (`.opf` files) as ConfigMaps.

An `.opf` file is a bash script. `accelplane onload profile` does not run it: it evaluates the part of the shell's
language that profiles use, within limits, and names every line that it cannot evaluate. `shell` runs bash instead.

    lexer        text -> commands                      arithmetic  $(( ))
    evaluation   commands -> settings                  files       the search for profiles, and reading them
    shell        settings of a profile that bash runs  configmap   settings -> YAML

No module of this package imports the API client.
"""
