#!/bin/sh
# Fill ./secrets for compose.yaml, or another folder that is given. What is there already stays.
set -eu
umask 077
folder=${1:-secrets}
mkdir -p "$folder"

random() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }

for name in admin-key disk-secret store-secret store-password; do
    [ -e "$folder/$name" ] || random > "$folder/$name"
done
[ -e "$folder/keys.toml" ] || printf '[[key]]\ntenant = "first"\nkey = "sk-%s"\n' "$(random)" > "$folder/keys.toml"

# The rights that docs/store.md lists. Valkey reads this file as another user; it has the password's digest only.
digest=$(printf %s "$(cat "$folder/store-password")" | sha256sum | cut -d ' ' -f 1)
cat > "$folder/store-users.acl" <<END
user default off
user kvblocks on #$digest ~kvblocks:* resetchannels -@all +touch +get +set +del +unlink +scan +eval +type +time +zadd +zcard +zscore +zrange +zrem +zremrangebyscore +expire +persist +ping +client +hello +select
END
chmod 644 "$folder/store-users.acl"
