{{- /* The images of the plugins, which the operator pins by the digests of the release. */ -}}
{{- define "accelplane.pluginImages" -}}
intel-dlb-plugin
intel-dsa-plugin
intel-fpga-plugin
intel-generic-plugin
intel-gpu-plugin
intel-iaa-plugin
intel-npu-plugin
intel-qat-plugin
intel-sgx-plugin
intel-dlb-initcontainer
intel-fpga-initcontainer
intel-gpu-initcontainer
intel-gpu-levelzero
intel-idxd-config-initcontainer
intel-qat-initcontainer
intel-sgx-initcontainer
{{- end -}}
