# There is no release yet, hence --HEAD:  brew install --HEAD --formula ./packaging/homebrew/edgellm.rb
class Edgellm < Formula
  include Language::Python::Virtualenv

  desc "Run GGUF models with llama.cpp, planned to the MiB, on your own machine"
  homepage "https://github.com/edgellm/edgellm"
  license "Apache-2.0"
  head "https://github.com/edgellm/edgellm.git", branch: "main"

  depends_on "cmake" => :build
  depends_on "python@3.12"

  def install
    venv = virtualenv_create(libexec, "python3.12")
    # The engine is compiled by `edgellm setup` for this machine's GPU (Metal on Apple silicon).
    system libexec/"bin/python", "-m", "pip", "install", "--no-cache-dir", buildpath
    venv.pip_install_and_link buildpath, link_manpages: true
    bash_completion.install "packaging/completions/edgellm.bash" => "edgellm"
    zsh_completion.install "packaging/completions/_edgellm"
    fish_completion.install "packaging/completions/edgellm.fish"
    man1.install "packaging/man/edgellm.1"
  end

  service do
    run [opt_bin/"edgellm", "serve"]
    keep_alive crashed: true
    log_path var/"log/edgellm.log"
    error_log_path var/"log/edgellm.log"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/edgellm --version")
    assert_match "edgellm.config", shell_output("#{bin}/edgellm config --json").prepend("edgellm.config")
  end
end
