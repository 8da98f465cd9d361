"""QuickAssist accelerators (QAT), `qat.intel.com`: virtual functions for user-space drivers, or kernel-mode instances."""
