"""The operator of the device plugins: reconciles custom resources to DaemonSets.

Decisions are pure functions that do not access the API server:

    models       the custom resources as types        fpgamodels  names for FPGA functions and regions as types
    crds         their definitions                    rules       rules for admission and API server
    settings     settings of an installation          images      references: parsing, validation, upgrade
    versions     semantic versions of image tags      features    fields that older images do not support
    defaulting   defaulting at admission              validation  errors and warnings at admission
    overlap      resources that select the same nodes daemonsets  the DaemonSet of a resource
    update       the difference to write              status      status and conditions
    dryrun       resources of a file, rendered
"""
