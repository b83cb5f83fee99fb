"""Parts of measurements that programs share."""
