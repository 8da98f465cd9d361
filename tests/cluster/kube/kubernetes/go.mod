module accelplane.test/kubernetes

// The requirements of each version are in ../kubernetes-MINOR/go.mod, which the build selects by -modfile.
