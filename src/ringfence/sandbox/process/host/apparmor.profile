# Ubuntu 23.10 and later allow user namespaces only to programs that have a profile which says so
# (kernel.apparmor_restrict_unprivileged_userns). Ringfence's zygotes are started through this launcher, and stay in its
# profile. It confines nothing else: what confines the programs in boxes are the boxes, and in those there are no
# further user namespaces.

abi <abi/4.0>,
include <tunables/global>

profile ringfence /usr/local/libexec/ringfence/zygote flags=(unconfined) {
  userns,

  # Additions of this site.
  include if exists <local/ringfence>
}
