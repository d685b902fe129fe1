#!/bin/sh
# Starts Ringfence's zygotes in the AppArmor profile that is attached to this file: /etc/apparmor.d/ringfence.
# Whoever may execute it may make user namespaces. To allow that to a group alone: chgrp GROUP, chmod 0750.
exec /usr/bin/env -u PWD -u OLDPWD -u SHLVL -u _ "$@"
