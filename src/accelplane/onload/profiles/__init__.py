"""Onload profiles (`.opf` files) as ConfigMaps.

An `.opf` file is a bash script. Bash runs it, in an environment without the user's variables, and its settings are what
it exports. A profile is the administrator's own file and is trusted like a shell script.

    shell        the settings of a profile      configmap   settings -> YAML

No module of this package imports the API client.
"""
