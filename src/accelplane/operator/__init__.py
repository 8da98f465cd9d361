"""The device plugins' operator: custom resources in, DaemonSets and statuses out.

What it decides is in plain functions of values, which talk to no API server:

    models       the custom resources as types        crds        their definitions, made from the types
    settings     what an installation decides         images      references, their check and their upgrade
    defaulting   what admission fills in              validation  what admission refuses, and warns of
    overlap      resources that meet on a node        daemonsets  the DaemonSet that a resource asks for
    update       what to write so that it is so       status      what is told about it
    dryrun       files of resources, rendered
"""
