"""The `neural-mp` command, as the script that an installation makes starts it."""

from neural_mp.cli.entry_point import main

if __name__ == "__main__":
    main()
